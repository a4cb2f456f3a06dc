public class Main {
  public static void main(String[] args) { System.out.println(new int[3][2][1].length + args[5]); }
}
