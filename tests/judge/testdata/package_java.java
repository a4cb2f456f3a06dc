package a.b;

public class Deep {
  public static void main(String... args) { System.out.println(Deep.class.getName()); }
}
