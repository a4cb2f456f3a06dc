public class Main {
  public static void main(String[] args) { System.out.println(new int[1][0][2]); }
}
